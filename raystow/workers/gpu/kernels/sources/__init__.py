"""The GPU kernels in Triton. ``make kernels`` compiles them to ``binaries``; nothing here is imported to save or to restore."""
