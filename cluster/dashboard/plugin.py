"""Mounts the page on a scheduler: one that is about to start, or one that already runs.

`PagePlugin` is a plain value, which a client may send: ``client.register_plugin(PagePlugin())``. Of Dask's dashboard it
uses ``applications``, ``template_variables``, `BokehApplication`, and the templates and the theme of its pages; of the
scheduler, ``http_application``, ``handlers`` and ``plugins``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from distributed import Scheduler, SchedulerPlugin

from cluster.dashboard.facts import Facts, Row
from cluster.dispatch.dispatcher import Dispatcher
from cluster.scheduler.plugin import DispatchPlugin, for_its_driver
from spotlight.files import home

PAGE = "spotlight"
ROWS = "spotlight_page"
"""Name of the scheduler's handler of the driver's rows."""
UPDATE_MS = 1000
"""Time between two updates while the page is open (`benchmarks.dashboard` says what a look costs)."""
TEMPLATE = Path(__file__).with_name("page.html")


def prepare() -> None:
    """Have schedulers that this process starts from now on serve the page beside their own.

    Only then do they list its plots in ``/individual-plots.json``, where dask-labextension finds them.
    """
    home()  # bokeh asks for it when it is imported
    from distributed.dashboard.scheduler import applications

    applications.update(pages())


class PagePlugin(SchedulerPlugin):
    """Keeps what the page shows, and mounts the page."""

    name = "spotlight-page"

    async def start(self, scheduler: Scheduler) -> None:
        self.facts = _facts(scheduler)
        scheduler.handlers[ROWS] = for_its_driver(scheduler, self.take)
        if hasattr(scheduler, "http_application"):
            _mount(scheduler)

    def take(self, rows: list[Row]) -> None:
        """Take rows of the driver; see `Facts.take`."""
        self.facts.take(rows)


def pages() -> dict[str, Callable[..., None]]:
    """Dask's "applications": the page, and each of its panels as a plot of its own."""
    from cluster.dashboard.panels import PANELS

    plots = {f"/individual-{PAGE}-{name}": partial(_plot_document, name) for name in PANELS}
    return {f"/{PAGE}": _page_document, **plots}


def _mount(scheduler: Scheduler) -> None:
    """Add the page to the scheduler's web server and to the navigation of Dask's pages, unless it is there.

    Pages need Bokeh; without it the metrics are there all the same.
    """
    prefix = _prefix(scheduler)
    if scheduler not in _measured:
        _mount_metrics(scheduler, prefix)
        _measured.add(scheduler)
    try:
        from distributed.dashboard.core import BokehApplication
        from distributed.dashboard.scheduler import template_variables
    except ImportError:
        return
    from tornado.ioloop import IOLoop

    variables = template_variables(scheduler)
    if PAGE not in variables["pages"]:
        variables["pages"].insert(0, PAGE)
    mounted = [path for app in scheduler.http_application.applications for path in getattr(app, "app_paths", ())]
    if f"/{PAGE}" in mounted:
        return
    known = {plot["url"] for plot in variables["plots"]}
    added = [path.strip("/") for path in pages() if "individual" in path and path.strip("/") not in known]
    variables["plots"] += [
        {"url": url, "name": url.removeprefix("individual-").replace("-", " ").title()} for url in added
    ]
    application = BokehApplication(pages(), scheduler, prefix=prefix, template_variables=variables)
    scheduler.http_application.add_application(application)
    application.initialize(IOLoop.current())
    application.start()


_measured: WeakSet[Scheduler] = WeakSet()
"""Schedulers to whose metrics ours were added."""
_known: WeakKeyDictionary[Scheduler, Facts] = WeakKeyDictionary()


def _facts(scheduler: Scheduler) -> Facts:
    """The scheduler's facts, whatever run it has: open pages continue with the next run."""
    if scheduler not in _known:
        _known[scheduler] = Facts(partial(_dispatch, ref(scheduler)))
    return _known[scheduler]


def _dispatch(scheduler: ref[Scheduler]) -> Dispatcher | None:
    there = scheduler()
    found = [plugin for plugin in there.plugins.values() if isinstance(plugin, DispatchPlugin)] if there else []
    return found[-1].shown if found else None


def _page_document(scheduler: Scheduler, extra: Mapping[str, Any], document: Any) -> None:
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env
    from markupsafe import Markup

    from cluster.dashboard.panels import PANELS
    from cluster.dashboard.text import chips

    for name in PANELS:
        _add(document, name, scheduler).root.name = name
    document.title = "Dask: Spotlight"
    document.template = env.from_string(TEMPLATE.read_text("utf-8"))
    titles = {name: title for name, (_, title) in PANELS.items()}
    document.template_variables.update(extra, titles=titles, chips=Markup(chips()))
    document.theme = BOKEH_THEME


def _plot_document(name: str, scheduler: Scheduler, extra: Mapping[str, Any], document: Any) -> None:
    from distributed.dashboard.components.scheduler import BOKEH_THEME

    _add(document, name, scheduler, titled=True)
    document.title = f"Dask: Spotlight {name}"
    document.theme = BOKEH_THEME


def _add(document: Any, name: str, scheduler: Scheduler, *, titled: bool = False) -> Any:
    from distributed.dashboard.components import add_periodic_callback

    from cluster.dashboard.panels import PANELS

    kind, title = PANELS[name]
    panel = kind(_facts(scheduler), title=title if titled else "")
    panel.update()
    document.add_root(panel.root)
    add_periodic_callback(document, panel, UPDATE_MS)
    return panel


def _prefix(scheduler: Scheduler) -> str:
    """Prefix of the addresses of Dask's pages, such as ``/hub/me``, from `dask scheduler --dashboard-prefix`."""
    found = (getattr(app, "prefix", "") for app in scheduler.http_application.applications)
    return next(("/" + prefix.strip("/") for prefix in found if prefix.strip("/")), "")


def _mount_metrics(scheduler: Scheduler, prefix: str) -> None:
    """Add our figures to Dask's at ``/metrics``; there are none of Dask's without prometheus_client."""
    from distributed.http.scheduler import prometheus

    from cluster.dashboard.metrics import exposition

    ((path, theirs, _),) = prometheus.routes

    class Metrics(theirs):  # type: ignore[misc,valid-type]
        def get(self) -> None:
            super().get()
            self.write("\n" + exposition(_facts(scheduler)))

    scheduler.http_application.add_handlers(
        ".*$", [(f"{prefix}/{path.strip('/')}", Metrics, {"dask_server": scheduler})]
    )
