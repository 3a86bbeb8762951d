"""Trained networks with their certificates: those in the package by name, and the folders that `equipoise train` writes."""

from equipoise.models.trained import Trained, bundled, load, save_certificate

__all__ = ["Trained", "bundled", "load", "save_certificate"]
