"""The round behind a dashboard, and everything that its page can do with it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from osfl.core.errors import RoundError
from osfl.core.types import Json
from osfl.dashboard.board import Board
from osfl.dashboard.guard import Guard
from osfl.dashboard.phase import Phase


@dataclass
class Controller:
    """What the handlers of requests share."""

    round: Path
    phase: Phase
    board: Board
    guard: Guard
    most_bytes: int
    drawing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def folder(self) -> Path:
        return self.phase.folder

    def state(self) -> dict[str, Json]:
        return self.board.state(self.phase.state(), self.phase.key is not None)

    def start_phase(self) -> None:
        found = self.state()
        if found["trouble"] or not (found["ready"] or found["released"]):
            raise RoundError(
                f"the server phase cannot begin: {found.get('waits_for') or found['trouble']}",
                field="round",
                fix="Receive what is missing first.",
            )
        self.phase.start()

    def resume(self) -> None:
        """What a killed dashboard was in the middle of goes on."""
        if self.phase.key is not None and self.phase.state()["state"] == "interrupted":
            self.phase.start()

    def look(self, path: Path) -> str:
        """The inspect page of a bundle; one at a time, because a bundle may be large."""
        from osfl.reports.inspection import inspection_page
        from osfl.roles.inspection.known import from_round
        from osfl.roles.inspection.look import look

        with self.drawing:
            return inspection_page(look(path, replace(from_round(self.round), where=""), name=path.name))
