"""``python -m raystow``: the command line, where its entry point is not on the path."""

from .cli import main

main()
