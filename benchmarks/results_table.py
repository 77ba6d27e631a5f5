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
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)

SAVES, NODE_SAVES, OLD_PEERS = "gpu_save-2026-11-26", "gpu_save-2026-11-26-node", "peers-2026-11"
COLD, LOADS, PAIR = "gpu_cold-2026-11-26", "gpu_restore-2026-11-26", "gpu_pair-2026-11-27"
CPU, CONTROL, CPU_COLD = "restore-2026-11-26", "control_plane-2026-11-23", "cpu_cold-2026-11-25-s3"
DEFAULT, NODE, PEER, PINNED = "raystow deflate", "raystow deflate, node", "torch_checkpointing", "DCP async pinned"
FAULTS, RANKS, SCALE = "faults-2026-11-25", "gpu_ranks-2026-11-27", "scale-2026-11-28"
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


def gpu() -> str:
    """Render saves and restores on one, two and four GPUs."""
    pair = [at(PAIR, "steps", n, "both at once", rank, "durable s") for n in "18" for rank in (0, 1)]
    peers = [at(LOADS, "contestants", saver, "GB/s") for saver in ("torch.save", PINNED, PEER)]
    both = [at(PAIR, "restore", "both at once", rank, "GB/s") for rank in (0, 1)]

    def four(saver: str, *figures: str) -> list[float]:
        return [at(RANKS, "saves", saver, *figure.split(".")) for figure in figures]

    rows = (
        (f"Save adds to steps of {long(SAVES, 1)}", lost(SAVES, 1, DEFAULT), lost(SAVES, 1, PEER), SAVES),
        (
            f"`fence` waits, {long(SAVES, 1)} step",
            *(f"{step(SAVES, 1, saver, 'fence ms'):.0f} ms" for saver in (DEFAULT, PEER)),
            SAVES,
        ),
        (f"Save adds to steps of {long(SAVES, 8)}", lost(SAVES, 8, DEFAULT), lost(SAVES, 8, PEER), SAVES),
        (f"Durable, {long(SAVES, 1)} step", *(f"{step(SAVES, 1, saver, 'durable s'):.2f} s" for saver in (DEFAULT, PEER)), SAVES),
        ("Stored / raw", *(share(step(SAVES, 1, saver, "ratio")).replace("1.000", "1") for saver in (DEFAULT, PEER)), SAVES),
        ("CPU seconds per GB saved", *(f"{step(SAVES, 1, saver, 'cpu s/GB'):.2f}" for saver in (DEFAULT, PEER)), SAVES),
        (
            f'With `process="node"`: a save adds to steps of {long(NODE_SAVES, 1, NODE)}, {long(NODE_SAVES, 8, NODE)}',
            f"{lost(NODE_SAVES, 1, NODE)}, {lost(NODE_SAVES, 8, NODE)}",
            "",
            NODE_SAVES,
        ),
        (
            "... durable; CPU seconds per GB",
            "{:.2f} s; {:.2f}".format(*(step(NODE_SAVES, 1, NODE, key) for key in ("durable s", "cpu s/GB"))),
            "",
            NODE_SAVES,
        ),
        (
            "State reaches host memory, idle GPU",
            f"{at('gpu_save-2026-11-22-bf16', 'idle', 'raystow deflate, whole state', 'arrived GB/s'):.0f} GB/s",
            f"{at('gpu_save-2026-11-22-bf16', 'idle', 'plain copy, whole state', 'GB/s'):.0f} GB/s (plain pinned copy)",
            "gpu_save-2026-11-22-bf16",
        ),
        (
            "Restore into GPU tensors, from /dev/shm",
            f"{at(LOADS, 'contestants', 'raystow deflate', 'GB/s'):.1f} GB/s",
            "{:.1f} (`torch.load`), {:.1f} (DCP), {:.1f} GB/s (torch_checkpointing)".format(*peers),
            LOADS,
        ),
        (
            "... from the node's memory",
            f"{at(PAIR, 'restore', 'alone', 0, 'GB/s'):.1f} GB/s",
            "",
            PAIR,
        ),
        ("... two GPUs at once, each", "{:.1f} and {:.1f} GB/s".format(*both), "", PAIR),
        (
            "Two GPUs save at once: durable, {:.0f} ms step; {:.0f} ms".format(
                *(at(PAIR, "steps", n, "alone", 0, "step ms") for n in "18")
            ),
            "{:.2f}, {:.2f} s; {:.2f}, {:.2f} s".format(*pair),
            "{:.2f} s; {:.2f} s (raystow, one GPU)".format(*(at(PAIR, "steps", n, "alone", 0, "durable s") for n in "18")),
            PAIR,
        ),
        (
            f"Four GPUs, FSDP2, 52 GB: a save adds to steps of {at(RANKS, 'saves', DEFAULT, 'step ms'):.0f} ms",
            *(
                "{:.0f} ms ({:.0f} to {:.0f})".format(*four(saver, "lost ms.median", "lost ms.min", "lost ms.max"))
                for saver in (DEFAULT, PEER)
            ),
            RANKS,
        ),
        (
            "... durable; CPU seconds per GB",
            *("{:.1f} s; {:.2f}".format(*four(saver, "durable s", "cpu s/GB")) for saver in (DEFAULT, PEER)),
            RANKS,
        ),
        (
            "... restore from /dev/shm, all together",
            *(f"{at(RANKS, 'restores', saver, 'GB/s'):.0f} GB/s" for saver in (DEFAULT, PEER)),
            RANKS,
        ),
        (
            "First save of a process holds the training",
            f"{hold('raystow, prepared')}, {hold('raystow, nothing before')} if it comes at once",
            hold(PEER),
            COLD,
        ),
        ("First restore of a process, from the store", cold(STORE), f"{cold(PEER)}, {cold('torch.save')} (`torch.load`)", COLD),
        ("... from the node's memory", cold(MEMORY), "", COLD),
    )
    return _with_files(("", "raystow", "torch_checkpointing 0.1.1, or as noted"), rows)


def cpu() -> str:
    """Render the control plane, and restores without a GPU."""
    local, s3 = ("results", "commit", "local", 2), ("results", "commit", "s3", 2)
    folder = [at(CPU, "restoring", 0, "ways", way, "GB/s") for way in ("folder", "memory", "dcp", "torch.load")]
    newest = [at(CONTROL, "results", "opening", store, "raystow.latest(uri)", "ms", "p50") for store in ("local", "s3")]
    commit = [at(CONTROL, *path, "commit ms", key) for path in (local, s3) for key in ("p50", "p99")]
    read = at(CPU, "restoring", 1, "ways", "apart", "store/needed")
    ways = ("raystow: restore_latest", "dcp.load", "torch.load", "raystow: restore_latest, S3", "boto3 download, S3")
    cold = [at(CPU_COLD, "ways", way, part) for way in ways for part in ("import", "seconds")]
    rows = (
        *_scale(),
        ("Commit with 1,000 versions, local folder: p50, p99", "{:.0f}, {:.0f} ms".format(*commit[:2]), CONTROL),
        ("... on S3 (moto)", "{:.0f}, {:.0f} ms".format(*commit[2:]), CONTROL),
        ("Find the newest of 10,000 versions: local folder, S3 (moto)", "{:.0f}, {:.0f} ms (1 GET)".format(*newest), CONTROL),
        ("Bytes read from the store / bytes needed, 4 nodes", f"{read:.4f}", CPU),
        ("Restore 193 MB on a CPU: folder, node's memory", "{:.2f}, {:.2f} GB/s".format(*folder[:2]), CPU),
        ("... `dcp.load`, `torch.load` from a folder", "{:.2f}, {:.2f} GB/s".format(*folder[2:]), CPU),
        ("First restore of 193 MB in a process, imports + call: folder", "{:.2f} + {:.2f} s".format(*cold[:2]), CPU_COLD),
        ("... `dcp.load`, `torch.load`", "{:.2f} + {:.2f} s, {:.2f} + {:.2f} s".format(*cold[2:6]), CPU_COLD),
        ("... S3 (Ceph); download by boto3", "{:.2f} + {:.2f} s; {:.2f} + {:.2f} s".format(*cold[6:]), CPU_COLD),
    )
    return _with_files(("", "measured"), rows)


def _scale() -> Iterator[Row]:
    """Yield what grows with the number of ranks."""
    saves = [("results", "coordinator", i) for i in range(3)]
    cpu = [at(SCALE, *save, "cpu") + at(SCALE, *save, "cpu of joining") for save in saves]
    memory = [at(SCALE, *save, "peak") / 2**20 for save in saves]
    record = [at(SCALE, *save, "record") / 1e6 for save in saves]
    yield "Coordinator, a save of 2,048, 16,384, 65,536 ranks: CPU, joining included", "{:.1f}, {:.1f}, {:.1f} s".format(*cpu), SCALE
    yield "... memory", "{:.0f}, {:.0f}, {:.0f} MiB".format(*memory), SCALE
    yield "... version record", "{:.2f}, {:.2f}, {:.2f} MB".format(*record), SCALE
    plans = [("results", "planning", nodes, "same") for nodes in ("2048", "8192")]
    figures = [at(SCALE, *plan, name) / unit for name, unit in (("cpu", 1), ("grown", 2**20), ("metadata", 1e6)) for plan in plans]
    text = "{:.2f}, {:.2f} s; {:.0f}, {:.0f} MiB; {:.1f}, {:.1f} MB".format(*figures)
    yield "Plan a restore of 16,384, 65,536 ranks: CPU; memory; metadata of a rank", text, SCALE
    removed = [at(SCALE, "results", "upkeep", name) for name in ("plan cpu", "collection cpu", "grown")]
    text = f"{removed[0] + removed[1]:.1f} s; {removed[2] / 2**20:.0f} MiB"
    yield "Delete a version of 65,536 ranks, 802,817 objects: CPU; memory", text, SCALE


def _with_files(header: Row, rows: Iterable[Row]) -> str:
    """Render rows that end with a result file: its machine and a link to it."""
    return table(
        (*header, "machine, file with date"),
        ((*row[:-1], f"{_machine(row[-1])}, [{row[-1]}](../benchmarks/results/{row[-1]}.json)") for row in rows),
    )


def _machine(file: str) -> str:
    """Return the machine of a result; the date is in the name of the file."""
    found = result(file)
    assert isinstance(found, dict)
    machine = found["machine"]
    gpu = machine["gpu"]["name"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3") + ", " if machine.get("gpu") else ""
    return f"{gpu}{machine['cores']} cores"


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
    "gpu": gpu,
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
