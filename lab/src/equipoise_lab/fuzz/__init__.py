"""Suites for `equipoise selfcheck`: random programs, damaged files, published bounds."""

from equipoise.testing.runner import Check


def programs_suite() -> tuple[Check, ...]:
    """Random programs, bounded and attacked."""
    from equipoise_lab.fuzz.networks import random_networks

    return (Check("programs, random source code", 1.0, random_networks),)


def files_suite() -> tuple[Check, ...]:
    """Files of every kind the library reads, damaged and edited."""
    from equipoise_lab.fuzz.files import damaged_files

    return (Check("files, damaged and hostile", 1.0, damaged_files),)


def peers_suite() -> tuple[Check, ...]:
    """Published bounds of convolution norms."""
    from equipoise_lab.fuzz.peers import other_bounds

    return (Check("convolutions, published bounds", 1.0, other_bounds),)
