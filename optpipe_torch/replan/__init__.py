"""Plans that improve while training runs: measured costs, a planner beside training, swaps between steps."""

from optpipe_torch.replan.measured import profile_of
from optpipe_torch.replan.records import PlannerNote, SwapRecord
from optpipe_torch.replan.replanner import Replanner

__all__ = ["PlannerNote", "Replanner", "SwapRecord", "profile_of"]
