"""Plans that improve while training runs: measured costs, a planner beside training, swaps between steps."""

from optpipe_torch.replan.measured import profile_of
from optpipe_torch.replan.replanner import Replanner, SwapRecord

__all__ = ["Replanner", "SwapRecord", "profile_of"]
