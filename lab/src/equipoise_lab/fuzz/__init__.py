"""Suites for `equipoise selfcheck`: trained operators, random programs, damaged files, published bounds, radii."""

from equipoise.testing.runner import Check


def trained_suite() -> tuple[Check, ...]:
    """Matrices and convolutions of every kind, trained ones, and both ends for an unknown input size."""
    from equipoise_lab.fuzz import norms

    return (
        Check("matrices, every kind", norms.any_matrices),
        Check("convolutions, every kind", norms.any_convolutions),
        Check("matrices, trained", norms.trained_matrices),
        Check("convolutions, trained", norms.trained_kernels),
        Check("convolutions, any size", norms.any_size),
    )


def programs_suite() -> tuple[Check, ...]:
    """Random programs, bounded and attacked."""
    from equipoise_lab.fuzz.networks import random_networks

    return (Check("programs, random source code", random_networks),)


def files_suite() -> tuple[Check, ...]:
    """Files of every kind the library reads, damaged and edited."""
    from equipoise_lab.fuzz.files import damaged_files

    return (Check("files, damaged and hostile", damaged_files),)


def peers_suite() -> tuple[Check, ...]:
    """Published bounds of convolution norms."""
    from equipoise_lab.fuzz.peers import other_bounds

    return (Check("convolutions, published bounds", other_bounds),)


def radii_suite() -> tuple[Check, ...]:
    """Certified radii and verdicts of random networks, attacked."""
    from equipoise_lab.fuzz.radii import attacked_radii

    return (Check("radii and verdicts, attacked", attacked_radii),)
