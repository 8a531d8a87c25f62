"""Your own callback: it ends the run when the mean loss of the last steps is good enough, and saves it.

`custom_callback.yaml` names the class. A factory with a parameter `config` gets the whole configuration. What
`state_dict` returns is in the checkpoints, so that a resumed run goes on with it.
"""

from collections import deque
from typing import Any

from speedtronic.trainer import Callback, RunView


class GoodEnough(Callback):
    LOSS, STEPS = 2.2, 10

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=self.STEPS)

    def on_step_end(self, run: RunView) -> None:
        self.losses.append(run.loss)
        mean = sum(self.losses) / len(self.losses)
        if len(self.losses) == self.STEPS and mean < self.LOSS:
            run.logger.info(f"a mean loss of {mean:.3f} is good enough")
            run.save()
            run.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses.extend(state["losses"])
