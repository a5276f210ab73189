"""How the chunks of a run become a result of one kind."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from crate_interp.results.result import Merge, Result

Tables = dict[str, pd.DataFrame]
Rules = Mapping[str, Merge]  # name of a table -> its merge rule


@dataclass(frozen=True)
class Kind:
    """A kind of result, and how a run becomes a result of this kind.

    result: the class. stages: the merge rules of each stage's tables, by the name of the stage;
    "untrained-0", "untrained-1", ... share the entry "untrained". finish: makes the result from the
    merged tables of each stage and the meta. A kind that is not measured in chunks has no stages
    and no finish.
    """

    result: type[Result]
    stages: Mapping[str, Rules] = field(default_factory=dict)
    finish: Callable[[Mapping[str, Tables], dict[str, Any]], Any] | None = None

    @property
    def name(self) -> str:
        """Returns the name of the kind in meta.json and run.json."""
        return self.result.KIND

    def rules_of(self, stage: str) -> Rules | None:
        """Returns the merge rules of a stage, or None if the kind has no such stage."""
        return self.stages.get(re.sub(r"-[0-9]+$", "", stage))
