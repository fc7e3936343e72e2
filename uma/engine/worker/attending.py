"""What attention has gone over: sums of all batches, from which the choice of a layout knows what the pool has cost."""

from __future__ import annotations

import attrs

from uma.engine.policy.layout import Attended


@attrs.define
class AttentionSums:
    """Cells that attention went over since the start, as it would have in one buffer. Belongs to the decode thread."""

    rows: int = 0
    """Decode rows computed."""
    rows_own: int = 0
    """Cells of their own that they attended to."""
    rows_masked: int = 0
    """Cells of other sequences, and of cache, that were in use beside those."""
    read_tokens: int = 0
    """Tokens computed in pieces, of prompts for the most part; below the same of them."""
    reads_own: int = 0
    reads_masked: int = 0

    def decoded(self, rows: int, own_cells: int, used_cells: int) -> None:
        """Count a decode step, at whose end the rows had `own_cells` in all, of `used_cells` in use."""
        self.rows += rows
        self.rows_own += own_cells
        self.rows_masked += rows * used_cells - own_cells

    def read(self, tokens: int, behind: int, used_cells: int) -> None:
        """Count a piece of one sequence `behind` so many of its tokens, while `used_cells` were in use."""
        self.read_tokens += tokens
        self.reads_own += tokens * (behind + tokens // 2)
        self.reads_masked += tokens * (used_cells - behind)

    def attended(self) -> Attended:
        """The sums of now."""
        return Attended(
            rows_own=self.rows_own,
            rows_masked=self.rows_masked,
            rows_longest=self.rows_own,  # near enough: rows that run together are mostly of a length
            reads_own=self.reads_own,
            reads_masked=self.reads_masked,
            rows=self.rows,
            read_tokens=self.read_tokens,
        )
