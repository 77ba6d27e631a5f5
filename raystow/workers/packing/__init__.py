"""Codes the chunks of an attempt on a node, gathers them into packs, and uploads these within a memory budget."""
