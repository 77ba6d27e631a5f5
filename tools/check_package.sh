#!/usr/bin/env bash
# Builds sdist and wheel into dist/, checks them with twine, and reads a version with each Python of $PYTHONS, in fresh environments.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/tools" && "$work/tools/bin/pip" install --quiet build twine
rm -rf dist && "$work/tools/bin/python" -m build --outdir dist .
"$work/tools/bin/twine" check --strict dist/*
"$work/tools/bin/python" - dist/*.whl <<'END'
import subprocess, sys, zipfile
tracked = {name for name in subprocess.check_output(["git", "ls-files", "raystow"], text=True).split()}
packed = {name for name in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in name}
assert packed == tracked, sorted(packed ^ tracked)
END
cp -r tests/compat/golden "$work/golden"
for python in ${PYTHONS:-python3}; do
  "$python" -m venv "$work/venv" && empty=$(du -sm "$work/venv" | cut -f1) && "$work/venv/bin/pip" install --quiet dist/*.whl
  (
    cd "$work" && venv/bin/raystow ls golden >/dev/null && venv/bin/raystow verify --deep --all golden >/dev/null
    venv/bin/python -c 'import raystow; v = raystow.open("golden").latest(); [v.read(name) for name in v.tensors()]'
  )
  added=$(($(du -sm "$work/venv" | cut -f1) - empty))
  echo "$("$work/venv/bin/python" -V): the wheel reads; $added MB installed, $empty MB of Python's own besides"
  [ "$added" -le 380 ] || { echo "an installation for reading has more than 380 MB"; exit 1; }
  rm -rf "$work/venv"
done
