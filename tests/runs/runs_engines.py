"""An engine for the tests: all inputs, last one first."""


def backwards(spec, items, execution):
    worker = spec.worker()
    for item in reversed(list(items)):
        yield worker(item)
