#!/usr/bin/env bash
# Compiles raystow/storage/coding/byte_loops.c for x86-64 with AVX2 and for aarch64. Needs gcc and Debian's gcc-aarch64-linux-gnu; the
# results need no library.
set -euo pipefail
cd "$(dirname "$0")/../raystow/storage/coding"
digest=$(sha256sum byte_loops.c | cut -d' ' -f1)

build() { # COMPILER MACHINE FLAGS...
  "$1" "${@:3}" -std=c11 -O3 -Wall -Wextra -Werror -ffreestanding -fPIC -shared -nostdlib -s -Wl,--build-id=none \
    "-DSOURCE_DIGEST=\"$digest\"" byte_loops.c -o "byte_loops.$2.so"
  if nm -D --undefined-only "byte_loops.$2.so" | grep .; then echo "it needs symbols of another library" >&2; exit 1; fi
}

build gcc x86_64 -march=x86-64-v3 -mtune=generic
build aarch64-linux-gnu-gcc aarch64 -march=armv8-a -mno-outline-atomics
