"""A plug-in for equipoise: a layer, a rule, a procedure and an experiment, each found through an entry point."""
