"""Which layer should I take? Every family of 1-Lipschitz layers × loss under one budget, with proved certificates."""

from equipoise_lab.scoreboard.board import Board, plan, play, read_board
from equipoise_lab.scoreboard.cell import Budget, Cell

__all__ = ["Board", "Budget", "Cell", "plan", "play", "read_board"]
