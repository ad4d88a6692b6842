"""An Airflow operator that runs a view. Tried with Airflow 3.3.

Beside it lies ``precompute_run.py``; in a DAG::

    with DAG("nightly", schedule="0 2 * * *", catchup=True): days =
        PrecomputeRun(task_id="daily_scores", config="/srv/project", view="daily_scores",
        partition="{{ ds }}") PrecomputeRun(task_id="top_k", config="/srv/project",
        view="top_k").set_upstream(days)
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException
from precompute_run import Refused, run_view


class PrecomputeRun(BaseOperator):
    """One run of one view; its report is what the task returns (XCom). A refused run is not tried
    again."""

    template_fields = ("view", "partition")

    def __init__(
        self, *, config: str, view: str, partition: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.config, self.view, self.partition = config, view, partition

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the view, its log in the task's."""
        try:
            return run_view(self.config, self.view, self.partition, log=self.log.info)
        except Refused as exc:
            raise AirflowFailException(str(exc)) from exc
