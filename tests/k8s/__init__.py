"""Manifests and chart."""
