"""Read a repository on a machine without Ray, torch or a GPU.

    python examples/read_without_ray.py URI

``URI``: ``s3://bucket/prefix`` or a folder. Tensors are torch tensors if torch is installed, else numpy arrays.
"""

import sys

import raystow

repository = raystow.open(sys.argv[1])
version = repository.latest()
if version is None:
    sys.exit("no version yet")

print(f"version {version.id}, step {version.step}, saved by {version.world_size} ranks, metrics {version.metrics}")
for name, info in version.tensors().items():
    print(f"  {name}  {info.dtype} {list(info.shape)}  {info.nbytes:,} bytes, stored as {info.stored:,}")

name, info = max(version.tensors().items(), key=lambda item: item[1].nbytes)
part = version.read(name, index=slice(0, 2) if info.shape else None)  # fetches only the chunks that overlap
print(f"the first rows of {name} as {type(part).__module__}.{type(part).__name__}:")
print(part)
