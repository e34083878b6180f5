"""`rdt plan`: what a sync would move, where, and how long it would take, without a GPU.

Source ranks and engine ranks exist on paper only, but what plans for them is what plans in a run: manifests, routing,
tracing, planning and linking. Bytes and copies are exact; times come from rates that a cluster description gives, by a
formula and, if asked for, by a simulation that executes the plan. What the model leaves out says `docs/plan.md`.
"""

from .cluster import Cluster, read_cluster
from .options import PlanOptions, read_options
from .report import PlanReport, make_plan_report, to_dict

__all__ = ["Cluster", "PlanOptions", "PlanReport", "make_plan_report", "read_cluster", "read_options", "to_dict"]
