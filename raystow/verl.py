"""verl: importing this module makes verl's checkpoint managers and trainers save to a repository and load from it.

Name it in verl's configuration: ``model.external_lib=raystow.verl``.
"""

from .storage import extras

with extras.named(), extras.tried("verl", "0.9"):
    from .integrations.verl import configure, install, write_files

    install()

__all__ = ["configure", "write_files"]
