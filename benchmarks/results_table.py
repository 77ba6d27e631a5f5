"""Render the tables of figures in the documents from the result files, so that no figure is copied by hand.

    python benchmarks/results_table.py             # print every table
    python benchmarks/results_table.py --write     # replace the tables in the documents
    python benchmarks/results_table.py --history   # print the medians of every GPU run, oldest first

A document marks the place of a table by ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
``tests/unit/project/test_documents.py`` compares each table with the output of this script.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)

SAVES, NODE_SAVES, OLD_PEERS = "gpu_save-2026-11-26", "gpu_save-2026-11-26-node", "peers-2026-11"
COLD, LOADS, PAIR = "gpu_cold-2026-11-26", "gpu_restore-2026-11-26", "gpu_pair-2026-11-27"
ROLLBACK, NODE_MEMORY = "gpu_restore-2026-11-28", "raystow, node's memory"
CPU, CONTROL, CPU_COLD = "restore-2026-11-26", "control_plane-2026-11-23", "cpu_cold-2026-11-25-s3"
DEFAULT, NODE, PEER, PINNED = "raystow deflate", "raystow deflate, node", "torch_checkpointing", "DCP async pinned"
FAULTS, RANKS, SCALE = "faults-2026-11-25", "gpu_ranks-2026-11-27", "scale-2026-11-29"
MEGATRON, ONE_RANK = "gpu_megatron-2026-11-29-two", "gpu_megatron-2026-11-29"
STORE, MEMORY = "raystow, from the store", "raystow, from the node's memory"

Row = tuple[str, ...]


@functools.cache
def result(file: str) -> object:
    """Return the content of a result file."""
    return json.loads((RESULTS / f"{file}.json").read_text())


def at(file: str, *path: str | int) -> float:
    """Return the number of a result file that these keys lead to."""
    found = result(file)
    for key in path:
        found = found[key]  # type: ignore[index]
    assert isinstance(found, int | float), (file, path)
    return float(found)


def step(file: str, micro_batches: int, saver: str, *figure: str) -> float:
    """Return a figure of a saver in a run of ``gpu_save.py``."""
    return at(file, "steps", str(micro_batches), saver, *figure)


def lost(file: str, micro_batches: int, saver: str) -> str:
    """Return the time that a save adds to the training loop: the median, and the range over the saves of the run."""
    median, least, most = (step(file, micro_batches, saver, "lost ms", key) for key in ("median", "min", "max"))
    return f"{median:.0f} ms ({least:.0f} to {most:.0f})"


def long(file: str, micro_batches: int, saver: str = DEFAULT) -> str:
    """Return how long the training's steps were."""
    return f"{step(file, micro_batches, saver, 'step ms'):.0f} ms"


def share(number: float) -> str:
    """Return a ratio without the zero in front."""
    return f"{number:.3f}".removeprefix("0")


def table(header: Row, rows: Iterable[Row]) -> str:
    """Render a Markdown table."""
    lines = [f"| {' | '.join(cells)} |\n" for cells in (header, *rows)]
    return "".join((lines[0], "|---" * len(header), "|\n", *lines[1:]))


def cold(case: str) -> str:
    """Return the rate of the first restore of a process."""
    return f"{at(COLD, 'settings', 'gigabytes') / at(COLD, 'restores', case, 'restore'):.1f} GB/s"


def hold(case: str) -> str:
    """Return the time for which the first save of a process blocks the training."""
    return f"{at(COLD, 'saves', case, 'hold'):.2f} s"


def overview() -> str:
    """Render the comparison in the README."""
    plain = [at(OLD_PEERS, "savers", "torch.save", "lost ms", key) / 1000 for key in ("min", "max")]
    warm = [at(LOADS, "contestants", saver, "GB/s") for saver in (PEER, PINNED, "torch.save")]
    rows = (
        (
            f"A save adds to steps of {long(SAVES, 1)}",
            f"**{step(SAVES, 1, DEFAULT, 'lost ms', 'median'):.0f} ms**",
            f"{step(SAVES, 1, PEER, 'lost ms', 'median'):.0f} ms",
            f"{step(SAVES, 1, PINNED, 'lost ms', 'median'):.0f} ms",
            f"{plain[0]:.1f} to {plain[1]:.1f} s",
        ),
        (
            "Durable after",
            f"**{step(SAVES, 1, DEFAULT, 'durable s'):.2f} s**",
            f"{step(SAVES, 1, PEER, 'durable s'):.1f} s",
            f"{step(SAVES, 1, PINNED, 'durable s'):.1f} s",
            f"{at(OLD_PEERS, 'savers', 'torch.save', 'durable s'):.1f} s",
        ),
        ("Bytes stored", f"**{step(SAVES, 1, DEFAULT, 'ratio'):.0%}**", "100%", "100%", "100%"),
        (
            "Restore, warm process",
            f"**{at(LOADS, 'contestants', 'raystow deflate', 'GB/s'):.1f} GB/s**",
            *(f"{rate:.1f} GB/s" for rate in warm),
        ),
        ("Restore, new process", f"**{cold(STORE)}**", *map(cold, (PEER, PINNED, "torch.save"))),
    )
    return table(("", "raystow", "torch_checkpointing 0.1.1", "DCP `async_save`, pinned", "`torch.save`"), rows)


def saves() -> str:
    """Render saves of one GPU."""
    rows = (
        (f"Added to a step of {long(SAVES, 1)}", lost(SAVES, 1, DEFAULT), lost(SAVES, 1, PEER), SAVES),
        (f"Added to a step of {long(SAVES, 8)}", lost(SAVES, 8, DEFAULT), lost(SAVES, 8, PEER), SAVES),
        *(
            (f'Added to a step of {long(NODE_SAVES, n, NODE)}, `process="node"`', lost(NODE_SAVES, n, NODE), "", NODE_SAVES)
            for n in (1, 8)
        ),
        (
            f"`fence` waits, step of {long(SAVES, 1)}",
            *(f"{step(SAVES, 1, saver, 'fence ms'):.0f} ms" for saver in (DEFAULT, PEER)),
            SAVES,
        ),
        (
            f"Durable after, step of {long(SAVES, 1)}",
            *(f"{step(SAVES, 1, saver, 'durable s'):.2f} s" for saver in (DEFAULT, PEER)),
            SAVES,
        ),
        ("Stored / raw", *(share(step(SAVES, 1, saver, "ratio")).replace("1.000", "1") for saver in (DEFAULT, PEER)), SAVES),
        ("CPU seconds per GB", *(f"{step(SAVES, 1, saver, 'cpu s/GB'):.2f}" for saver in (DEFAULT, PEER)), SAVES),
        ("First save of a process blocks, prepared", hold("raystow, prepared"), "", COLD),
        ("First save of a process blocks", hold("raystow, nothing before"), hold(PEER), COLD),
    )
    return _with_files(("", "raystow", "torch_checkpointing"), rows)


def restores() -> str:
    """Render restores of one GPU."""
    warm = [at(LOADS, "contestants", saver, "GB/s") for saver in ("raystow deflate", PEER, PINNED, "torch.save")]
    rows = (
        ("Warm process, from /dev/shm", *(f"{rate:.1f}" for rate in warm), LOADS),
        (
            "New process, from /dev/shm",
            *(cold(case).removesuffix(" GB/s") for case in (STORE, PEER, PINNED, "torch.save")),
            COLD,
        ),
        ("New process, from the node's memory", cold(MEMORY).removesuffix(" GB/s"), "", "", "", COLD),
        ("Rollback, from the node's memory", f"{at(ROLLBACK, 'contestants', NODE_MEMORY, 'GB/s'):.1f}", "", "", "", ROLLBACK),
    )
    return _with_files(("GB/s", "raystow", "torch_checkpointing", "DCP", "`torch.load`"), rows)


def gpus() -> str:
    """Render saves and restores of several GPUs of a host."""
    both = [at(PAIR, "restore", "both at once", rank, "GB/s") for rank in (0, 1)]
    pair = [at(PAIR, "steps", "1", "both at once", rank, "durable s") for rank in (0, 1)]

    def four(saver: str, *figures: str) -> list[float]:
        return [at(RANKS, "saves", saver, *figure.split(".")) for figure in figures]

    rows = (
        ("Two H200: durable after", "{:.2f} and {:.2f} s".format(*pair), "", PAIR),
        ("Two H200: restore from the node's memory, each", "{:.1f} and {:.1f} GB/s".format(*both), "", PAIR),
        (
            f"Four H100: added to a step of {at(RANKS, 'saves', DEFAULT, 'step ms'):.0f} ms",
            *(
                "{:.0f} ms ({:.0f} to {:.0f})".format(*four(saver, "lost ms.median", "lost ms.min", "lost ms.max"))
                for saver in (DEFAULT, PEER)
            ),
            RANKS,
        ),
        ("Four H100: durable after", *("{:.1f} s".format(*four(saver, "durable s")) for saver in (DEFAULT, PEER)), RANKS),
        ("Four H100: CPU seconds per GB", *("{:.2f}".format(*four(saver, "cpu s/GB")) for saver in (DEFAULT, PEER)), RANKS),
        (
            "Four H100: restore from /dev/shm, in all",
            *(f"{at(RANKS, 'restores', saver, 'GB/s'):.0f} GB/s" for saver in (DEFAULT, PEER)),
            RANKS,
        ),
    )
    return _with_files(("", "raystow", "torch_checkpointing"), rows)


def megatron() -> str:
    """Render saves and loads of Megatron-Core: the later saves and the last load of a run."""
    theirs = "torch_dist, dp_reshardable"
    savers = ("raystow", theirs, f"{theirs}, asynchronous", f"{theirs}, NVRx")
    figures = (
        ("Added to a step", "lost", slice(1, None)),
        ("Durable after", "durable", slice(1, None)),
        ("Load", "load", slice(-1, None)),
    )
    rows = [
        (f"{where}: {text.lower()}", *(_seconds(ranks[0].get(saver), figure, saves) for saver in savers), file)
        for file, layout, where in ((MEGATRON, "TP2", "TP2, two H200"), (ONE_RANK, "DP1", "One H200"))
        for ranks in [result(file)["layouts"][layout]["ranks"]]  # type: ignore[index]
        for text, figure, saves in figures
    ]
    return _with_files(("", "raystow", "`torch_dist`", "asynchronous", "with NVRx"), rows)


def _seconds(of_saver: Mapping[str, list[float]] | None, figure: str, which: slice) -> str:
    return f"{statistics.median(of_saver[figure][which]):.2f} s" if of_saver else ""


def control() -> str:
    """Render the control plane."""
    local, s3 = ("results", "commit", "local", 2), ("results", "commit", "s3", 2)
    newest = [at(CONTROL, "results", "opening", store, "raystow.latest(uri)", "ms", "p50") for store in ("local", "s3")]
    commits = [[at(CONTROL, *path, "commit ms", key) for path in (local, s3)] for key in ("p50", "p99")]
    read = at(CPU, "restoring", 1, "ways", "apart", "store/needed")
    rows = (
        ("Commit with 1,000 versions, median: folder, S3 (moto)", "{:.0f}, {:.0f} ms".format(*commits[0]), CONTROL),
        ("Commit with 1,000 versions, 99th percentile: folder, S3 (moto)", "{:.0f}, {:.0f} ms".format(*commits[1]), CONTROL),
        ("Find the newest of 10,000 versions, one GET: folder, S3 (moto)", "{:.0f}, {:.0f} ms".format(*newest), CONTROL),
        ("Bytes that 4 nodes read from the store / bytes needed", f"{read:.4f}", CPU),
    )
    return _with_files(("", "measured"), rows)


def scale() -> str:
    """Render what grows with the number of ranks."""
    saves = [("results", "coordinator", i) for i in range(3)]
    plans = [("results", "planning", nodes, "same") for nodes in ("2048", "8192")]

    def save(figure: str, form: str, name: str, of: int = 1) -> Row:
        return name, *(f"{at(SCALE, *one, figure) / of:{form}}" for one in saves)

    def plan(figure: str, form: str, name: str, of: int = 1) -> Row:
        return name, "", *(f"{at(SCALE, *one, figure) / of:{form}}" for one in plans)

    def upkeep(figure: str, form: str, name: str) -> Row:
        return name, "", *(f"{at(SCALE, 'results', 'upkeep', nodes, figure):{form}}" for nodes in ("2048", "8192"))

    def walk(operation: str, name: str) -> Row:
        row = at(SCALE, "results", "manifest", operation, "cpu") / at(SCALE, "results", "manifest", "chunk rows")
        return name, *(f"{row * at(SCALE, *one, 'chunk rows') / 60:.1f}" for one in saves)

    rows = (
        save("cpu", ".1f", "Save: coordinator's CPU seconds"),
        save("cpu of joining", ".1f", "... joining: CPU seconds"),
        save("peak", ".0f", "... memory, MiB", 1 << 20),
        save("record", ".2f", "Version record, MB", 10**6),
        plan("cpu", ".2f", "Plan a restore: CPU seconds"),
        plan("grown", ".0f", "... memory, MiB", 1 << 20),
        plan("metadata", ".1f", "... metadata, MB", 10**6),
        upkeep("collection cpu", ".1f", "Delete a version: CPU seconds"),
        upkeep("deletion requests", ".0f", "... deletions of 1,000 objects"),
        walk("verify", "`verify`, without packs: CPU minutes"),
        walk("show", "`show`: CPU minutes"),
        walk("cp", "`cp`, without packs: CPU minutes"),
        walk("thin", "Thinning, without packs: CPU minutes"),
    )
    return table((f"[{SCALE}](../benchmarks/results/{SCALE}.json)", "2,048", "16,384", "65,536 ranks"), rows)


def cpu() -> str:
    """Render restores without a GPU."""
    warm = [at(CPU, "restoring", 0, "ways", way, "GB/s") for way in ("folder", "memory", "dcp", "torch.load")]
    names = {
        "raystow, from a folder": (f"{warm[0]:.2f} GB/s", "raystow: restore_latest"),
        "raystow, from the node's memory": (f"{warm[1]:.2f} GB/s", ""),
        "`dcp.load`": (f"{warm[2]:.2f} GB/s", "dcp.load"),
        "`torch.load`": (f"{warm[3]:.2f} GB/s", "torch.load"),
        "raystow, from S3 (Ceph)": ("", "raystow: restore_latest, S3"),
        "boto3, download only": ("", "boto3 download, S3"),
    }

    def first(way: str) -> str:
        return f"{sum(at(CPU_COLD, 'ways', way, part) for part in ('import', 'seconds')):.2f} s" if way else ""

    return table(
        ("193 MB", "warm", "new process, with imports"), ((name, rate, first(way)) for name, (rate, way) in names.items())
    )


def _with_files(header: Row, rows: Iterable[Row]) -> str:
    """Render rows that end with their result file; links to the files follow the table."""
    found = list(rows)
    files = ", ".join(f"[{file}](../benchmarks/results/{file}.json)" for file in dict.fromkeys(row[-1] for row in found))
    return f"{table(header, (row[:-1] for row in found))}\nFiles: {files}.\n"


def runs() -> str:
    """Render the medians of every run of ``gpu_save.py``."""
    rows = []
    for path in sorted(RESULTS.glob("gpu_save-*.json"), key=lambda path: json.loads(path.read_text())["date"]):
        found = json.loads(path.read_text())
        for micro_batches, savers in found["steps"].items():
            for saver, figures in savers.items():
                if "lost ms" not in figures:
                    continue
                medians = (f"{figures['lost ms']['median']:.1f}", f"{figures['durable s']:.2f}", share(figures["ratio"]))
                rows.append((found["date"][:10], str(found["versions"]["commit"]), path.name, saver, micro_batches, *medians))
    return table(("date", "commit", "file", "saver", "micro-batches a step", "lost ms", "durable s", "stored / raw"), rows)


def faults() -> str:
    """Render the outcomes of all savers in ``faults.py``."""
    savers = dict(result(FAULTS)["savers"])  # type: ignore[index]
    kinds = list(next(iter(savers.values())))
    return table(("fault", *savers), ((kind, *(_outcome(savers[saver][kind]) for saver in savers)) for kind in kinds))


def _outcome(of: dict[str, float | None]) -> str:
    parts = ["**hung**"] * bool(of["hung"])
    parts += [
        f"**{what} {of[key]:.0f}**"
        for what, key in (("crashed", "crashed"), ("lost", "lost steps"), ("wrong", "wrong"))
        if of[key]
    ]
    back = of["recovered after s"]
    return ", ".join([*parts, f"{back:.1f} s" if back is not None else "not recovered"])


TABLES = {
    "overview": overview,
    "saves": saves,
    "restores": restores,
    "gpus": gpus,
    "megatron": megatron,
    "control": control,
    "scale": scale,
    "cpu": cpu,
    "faults": faults,
}


def filled(document: str) -> str:
    """Return the text of a document with its tables rendered again."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[4], document)


def main(arguments: list[str]) -> None:
    """Print the tables or the history, or write the tables into the documents."""
    if arguments == ["--write"]:
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
            path.write_text(filled(path.read_text()))
    elif arguments == ["--history"]:
        print(runs())
    else:
        for name, render in TABLES.items():
            print(f"{name}\n\n{render()}")


if __name__ == "__main__":
    main(sys.argv[1:])
