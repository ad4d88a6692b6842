"""Dagster assets: one for each view of a project, in the order of what reads what. Tried with
Dagster 1.13.

Beside it lies ``precompute_run.py``; in a code location::

    defs = Definitions(assets=view_assets("/srv/project", {"item_embedding": [], "top_k":
    ["item_embedding"]}))
"""

from collections.abc import Mapping, Sequence

from dagster import AssetExecutionContext, AssetsDefinition, Failure, MaterializeResult, asset
from precompute_run import Refused, run_view


def view_assets(config: str, views: Mapping[str, Sequence[str]]) -> list[AssetsDefinition]:
    """An asset for each view.

    Args:
        config: the project's folder.
        views: name → the views that it reads, or runs after.
    """
    return [_view_asset(config, view, after) for view, after in views.items()]


def _view_asset(config: str, view: str, after: Sequence[str]) -> AssetsDefinition:
    @asset(name=view, deps=list(after), group_name="precompute", kinds={"precompute"})
    def made(context: AssetExecutionContext) -> MaterializeResult:
        try:
            report = run_view(config, view, log=context.log.info)
        except Refused as exc:
            raise Failure(str(exc), allow_retries=False) from exc
        counts = {f"precompute/{name}": count for name, count in report["counts"].items()}
        return MaterializeResult(
            metadata={
                "snapshot": report["snapshot"],
                "run": report["run"],
                "seconds": report["seconds"],
                **counts,
            }
        )

    return made
