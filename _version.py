"""The version, readable without importing anything."""

__version__ = "0.1.0"
