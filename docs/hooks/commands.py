"""The command reference, made from the help texts of the commands themselves."""

from __future__ import annotations

from typer.testing import CliRunner

from equipoise.cli.app import COMMANDS, build, installed

_RUN = {
    "run": "its folder",
    "kind": "`sampled` or `proved`",
    "accuracy": "radius → certified accuracy",
    "average_radius": "wrong and uncertified answers count as 0",
    "statuses": "how many inputs are proved, wrong, abstained, …",
    "done, total, finished": "inputs",
    "procedure, sigma, alpha, draws, seconds, methods, deployed": "how",
    "clean": "share of right answers",
    "verdicts": "with `--complete`: how many inputs are proved, broken, undecided",
    "failed, failures": "inputs without an answer, and why",
    "labelled, about, notes": "what is certified, in words",
    "manifest": "model, data, settings, versions",
}
#: what --json prints: command → its keys and their meaning; every key is always there
JSON = {
    "audit": {
        "upper, log_upper": "the bound, and its logarithm; `upper` is null beyond the largest float",
        "product, fused, log_product, log_fused, log_chain, method": "the bounds it is the smallest of",
        "kind, norm, ball": "`upper`, `l2`, the radius of the inputs or null",
        "layers": "a row per operation: name, kind, shape, lower, upper, share, method, note",
        "fix_first, notes": "the layers that add most to the bound; what a reader should know",
    },
    "norm": {
        "file, rtol, input_size, refused": "the question, and how many tensors were refused",
        "weights": "a row per tensor: name, shape, dtype, status, lower, upper, gap, note",
    },
    "certify, prove, derive, merge": _RUN,
    "attack": {
        "run, kind, inputs": "what was attacked",
        "inside, broken": "certificates attacked inside their radius; those that broke: id, distance, radius",
        "broken_beyond": "how many broke at 1.5 times the radius",
        "accuracy": "rows: epsilon, certified, attacked",
        "failures": "inputs that could not be attacked",
    },
    "predict": {
        "run, data, n, alpha": "the question",
        "answers": "rows: id, answer (null: none), class, failure, label",
    },
    "report": {
        "title, created, versions, runs, report": "the page",
        "series": "a curve each: model, run, procedure, norm, radius, prediction, label, status, certified_accuracy, …",
        "attacks, audits, sets, tested": "distances, bounds, coverage of prediction sets, and how many certificates broke",
    },
    "curvature": {
        "model, data, parameters, samples, loss": "the question",
        "top, trace": "and `density`, `sharpness`, if asked for",
    },
}


def reference() -> str:
    """`commands.md`: every command with its help, and the documents of `--json`."""
    parts = [
        "# Commands\n\nWhat `equipoise COMMAND --help` prints. Tab completion: `equipoise --install-completion`.\n"
    ]
    for command in (*COMMANDS, *installed()):
        ran = CliRunner().invoke(
            build(wanted=command.name),
            [command.name, "--help"],
            prog_name="equipoise",
            terminal_width=80,
        )
        assert ran.exit_code == 0, (command.name, ran.output)
        parts.append(f"## {command.name}\n\n```text\n{ran.stdout.strip()}\n```\n")
    parts.append(
        "## JSON documents\n\nWith `--json` stdout holds one document; numbers that JSON lacks are null. "
        'A refusal is `{"error": sentence}` with exit code 2.\n'
    )
    for command, keys in JSON.items():
        rows = [f"| {names} | {meaning} |" for names, meaning in keys.items()]
        parts.append("\n".join([f"| {command} | |", "|---|---|", *rows, ""]))
    return "\n".join(parts)
