"""The checks of ``raystow doctor``: each returns a finding, also for errors."""
