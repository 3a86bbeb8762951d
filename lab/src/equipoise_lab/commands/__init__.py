"""The commands that the lab adds to `equipoise`: `reproduce`, `bench` and `scoreboard`."""
