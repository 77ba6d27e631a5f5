#!/usr/bin/env bash
# Compiles raystow/storage/coding/byte_loops.c for x86-64 with AVX2. Needs gcc; the result needs no library.
set -euo pipefail
cd "$(dirname "$0")/../raystow/storage/coding"
digest=$(sha256sum byte_loops.c | cut -d' ' -f1)
gcc -std=c11 -O3 -march=x86-64-v3 -mtune=generic -Wall -Wextra -Werror -ffreestanding -fPIC -shared -nostdlib -s -Wl,--build-id=none \
  "-DSOURCE_DIGEST=\"$digest\"" byte_loops.c -o byte_loops.x86_64.so
if nm -D --undefined-only byte_loops.x86_64.so | grep .; then echo "it needs symbols of another library" >&2; exit 1; fi
