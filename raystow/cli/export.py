"""``raystow export``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..orchestrator.export.destination import Destination
from ..orchestrator.export.hf_folder import HfFolder, plan_folder
from ..storage.real_paths import real_path
from ..storage.versions.version import Version
from ..storage.versions.version_selector import LATEST
from . import hub, options
from .options import Json, Uri, Which
from .output import count, emit, err, fields_of, out, printable, size
from .progress import progress_bar
from .target import open_target


class FloatType(str, Enum):
    """A dtype that ``export`` converts to."""

    FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"


@dataclass(frozen=True)
class ExportedFile:
    """A file with tensors, of ``nbytes`` in all."""

    name: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class ExportReport:
    """The fields of ``--json`` that say what was written; all but the first two have content for ``--hf`` only."""

    path: str
    files: list[ExportedFile]
    prefix: str | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    commit: str | None = None


def export(
    uri: Uri,
    version: Which = LATEST,
    hf: Annotated[
        Destination | None,
        options.place("--hf", help="New or empty folder for from_pretrained; or s3://, gs://, az://.", show_default=False),
    ] = None,
    torch: Annotated[Path | None, options.file("--torch", help="New file for torch.load.", show_default=False)] = None,
    prefix: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="Export the tensors with this prefix; by default, the only mapping of weights."),
    ] = None,
    dtype: Annotated[FloatType | None, typer.Option(metavar="DTYPE", help="Convert to float32, bfloat16 or float16.")] = None,
    files: Annotated[Path | None, options.folder(help="Copy this folder's config and tokenizer files.")] = None,
    keep_names: Annotated[bool, typer.Option("--keep-names", help="Export names of PEFT and of wrappers, too.")] = False,
    max_shard_size: Annotated[int, options.size(help="Split model.safetensors between tensors above this size.")] = "5GB",  # type: ignore[assignment]
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Upload the folder to the Hugging Face Hub.")] = None,
    json: Json = False,
) -> None:
    """Write a model for Hugging Face's libraries, or the whole state for torch.

    With --hf, writes model.safetensors, or numbered files with an index, in bounded memory, without the names' prefix in the
    state, such as "model.". If --files has adapter_config.json, writes only the LoRA adapter, as adapter_model.safetensors.
    --push requires huggingface_hub, and creates a private repository if there is none.

    With --torch, writes the nested state with the plain values of rank 0 by one torch.save. It must fit into memory.

    All digests are checked. The folder or file appears when everything is on the disk. In an object store, the index and
    config.json are written last, and the same command continues an interrupted export.

    Example:  raystow export s3://bucket/runs/llama --hf ./llama --files ./config --dtype bfloat16
    """
    if (hf is None) == (torch is None):
        raise typer.BadParameter("give either --hf or --torch")
    if hf is None and (prefix, dtype, files, keep_names, push) != (None, None, None, False, None):
        raise typer.BadParameter("--prefix, --dtype, --files, --keep-names and --push apply to --hf")
    if push is not None and hf is not None and hf.folder is None:
        raise typer.BadParameter("--push uploads a folder: give a path to --hf")
    target = open_target(uri)
    chosen = target.version(version)
    start = target.repository.clock.monotonic()
    with target.repository.lease(chosen):
        if torch is not None:
            done = _torch_file(torch, chosen, quiet=json)
        elif hf is not None:
            plan = plan_folder(chosen, prefix=prefix, dtype=dtype and dtype.value, source=files, limit=max_shard_size)
            if not keep_names:
                plan.refuse_unloadable()
            if push is not None:
                hub.create_repository(push)  # an error comes before anything is written
            done = _hf_folder(hf, plan, quiet=json)
    if push is not None:
        names = sorted(path.name for path in Path(done.path).iterdir())
        err.print(f"uploads to {printable(push)}: {printable(', '.join(names))}")
        done = replace(done, commit=hub.upload(push, Path(done.path), f"raystow version {chosen.id}, step {chosen.step}"))
    if json:
        seconds = round(target.repository.clock.monotonic() - start, 3)
        emit({"uri": target.uri, "version": chosen.id, "step": chosen.step, **fields_of(done), "seconds": seconds})
        return
    out.print(f"version {chosen.id} (step {chosen.step}) is in {done.path}")
    for file in done.files:
        out.print(f"  {file.name}: {count(file.tensors, 'tensor')}, {size(file.nbytes)}")
    if done.prefix:
        out.print(f"  prefix of the names in the version: {printable(done.prefix)}")
    for name, other in done.tied.items():
        out.print(f"  tied: {printable(name)} is {printable(other)}")
    if done.copied:
        out.print(f"  copied: {printable(', '.join(done.copied))}")
    if done.commit is not None:
        out.print(f"  uploaded: {printable(done.commit)}")


def _hf_folder(to: Destination, plan: HfFolder, *, quiet: bool) -> ExportReport:
    files = [ExportedFile(file.name, len(file.tensors), file.nbytes) for file in plan.files]
    with to.new(plan.plan) as folder, progress_bar(f"version {plan.version.id}", plan.raw, quiet=quiet) as advance:
        plan.write(folder, advance)
    return ExportReport(to.shown, files, plan.prefix, plan.tied, [*plan.copied])


def _torch_file(to: Path, version: Version, *, quiet: bool) -> ExportReport:
    from .torch_file import write_torch_file  # requires torch

    with progress_bar(f"version {version.id}", version.raw, quiet=quiet) as advance:
        write_torch_file(to, version, advance)
    return ExportReport(str(real_path(to)), [ExportedFile(to.name, len(version.tensors()), version.raw)])
