"""Copies of versions in other stores, and standing replicas of repositories."""
