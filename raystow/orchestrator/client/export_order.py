"""What rank 0 sends with each save so that the coordinator can export versions."""

from __future__ import annotations

from ...storage.addresses import local_path
from ...storage.arguments import refused
from ...storage.errors import StateError
from ...storage.real_paths import small_file
from ...storage.retention.export_rule import Export
from ...storage.retention.policy import Policy
from ...workers.protocol.messages import MAX_EXPORT_FILE, ExportOrder
from ..export.hf_folder import files_to_copy


def export_order(export: object, retention: Policy | None, rank: int) -> ExportOrder | None:
    """Return what a rank sends: an order with the config and tokenizer files, of rank 0 only.

    Raises:
        StateError: ``export`` is no ``Export``, its files are not in a folder or too large, or no policy keeps the best version.
    """
    if export is None:
        return None
    if not isinstance(export, Export):
        raise refused("export", export, 'a raystow.Export, such as Export("s3://bucket/model", when="best")', "None")
    if export.when == "best" and (retention is None or retention.keep_best is None):
        remedy = 'give the metric: retention=raystow.Policy(keep_best=("loss", "min", 1))'
        raise StateError('when="best" needs a policy that keeps the best version', subject="export", remedy=remedy)
    if rank > 0:
        return None
    found = {} if export.tokenizer is None else files_to_copy(local_path("tokenizer", export.tokenizer))
    files = {name: small_file(path) for name, path in found.items()}
    if (nbytes := sum(map(len, files.values()))) > MAX_EXPORT_FILE:
        what = f"its config and tokenizer files have {nbytes:,} bytes, more than {MAX_EXPORT_FILE:,}"
        raise StateError(what, subject=str(export.tokenizer), remedy="give a folder without other files")
    return ExportOrder(export, files)
