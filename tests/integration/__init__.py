"""Tests on real Ray clusters, and of commands and frameworks."""
