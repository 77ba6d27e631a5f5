"""Two tensors with equal digests of 64 bits: an attacker who knows the keys of a sum of products finds as many as needed.

All but 128 words are equal. Both sums of each tensor are the same modulo 2**64: the one of ``raw_digest``, whose keys are public,
and one with other public keys over the words that MurmurHash3's finalizer has made of these words, so 128 bits in all. Found by
Wagner's algorithm for the generalized birthday problem (128 lists of 2**17 words; a minute on one core).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

BLOCK = 16_384  # words of a digest's block: a collision in one is a collision in any
_VALUE = 0.019
_OTHERS = (
    "dc8b653ce86d12bc26c129bd22ac073c93b2f23c339e67bc239290baa3acbb3b0b37823c1bdccd3b15f5593d15add7bb"
    "84182f3c4e1b7c3cfdb5dbbc45b4bb3c6f0f5a3c3f1efabbc94df13c6d638abcfdb6f3bc354b093d1bf678bddb9c693b"
    "832a013d03776ebdfedf10bd78e86cba8a29233b28c6c63c5f51dbbbef487abc192ad2bc7d66bc3c1eeb543d54e2023b"
    "3b267ebcdb0d9fbc556ea1bc4553173cee67383d0c223139426ecdbb629f99bc156c36bdf5c6803c7f541e3bd795b8bb"
    "9befab3c3b2423bdc3f08c3cc3af4bbd9b9a0bbddb8f4ebcb13e943cb5bd0e3a29ed1abb2dce373c2fbf99bbf7c14bbc"
    "b881643c9cfb5f3ca020963cf8c0143d4a191fbd2015f2bcff728fbb2f90453d90040e3caa01143c6f720ebcafcc8fbc"
    "13c07bbb13012a3d0251ec3ad290473b16f5a03bd61a033d68f08bbb7cb7713d523efa3b14f988bce60648392459f2bc"
    "ace236bd10aff33bd18e1b3cbd1a9c3c300aedbb82f1453dc4daedbbd895b13c5602603caef40bba86bafd3bc0347639"
    "be1d96bca4d6a3bc6b63d5bbcbd080bc3664f33be4d6aa3b3684863bbea42f3dd34e783cb32b143cf1e9d23ac502673b"
    "918d65bc7982093d7c8983bb3ec1d13ca0c8a8bcb48466bcf28b0b3db20da43b1811043bf69dc6bc10556e3ba842f2bb"
    "06d2ad3c08c5e9bb01c0393b1de09a3c439786bcc35cf93bfeae9a3baa3ad53c"
)


def colliding_tensors() -> tuple[Floats, Floats]:
    """Return the two: float32 [32768], which are also numbers if they are seen as bfloat16 or float16."""
    numbers = np.random.default_rng(0).normal(0, 0.02, 4 * BLOCK).astype(np.float32)
    one = np.ascontiguousarray(numbers.view(np.uint16)[1::2]).view(np.float32)
    others = np.frombuffer(bytes.fromhex(_OTHERS), "<f4")
    place = slice(BLOCK, BLOCK + others.size)
    one[place] = _VALUE
    other = one.copy()
    other[place] = others
    return one, other
