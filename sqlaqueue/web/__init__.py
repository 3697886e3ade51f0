"""A dashboard of queues: an ASGI application that mounts into a web application under any path.

::

    def access(request):
        if not request.user.is_staff:
            return None
        return Access(read=True, act=request.user.is_admin, user=request.user.name)


    app.mount("/queues", Dashboard([Email, Invoice], sessionmaker(engine), access=access))

Without an application: ``sqlaqueue web app.models``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlaqueue.web.dashboard import Dashboard
    from sqlaqueue.web.data.records import AuditMixin
    from sqlaqueue.web.settings import ACTIONS, Access, Action

__all__ = ["ACTIONS", "Access", "Action", "AuditMixin", "Dashboard"]


# Loaded when first used: the command line edits jobs by `web.data`, which needs neither Jinja nor Starlette.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    if name == "AuditMixin":
        # Without these: the models of an application are loaded by workers as well.
        from sqlaqueue.web.data.records import AuditMixin  # noqa: PLC0415 - when it is first used

        return AuditMixin
    try:
        import jinja2  # noqa: F401, PLC0415 - an extra, see above
        import starlette  # noqa: F401, PLC0415 - an extra, see above
    except ModuleNotFoundError as missing:
        msg = f"sqlaqueue.web needs {missing.name}: pip install 'sqlaqueue[web]'"
        raise ModuleNotFoundError(msg, name=missing.name) from None
    module = import_module(f"sqlaqueue.web.{'dashboard' if name == 'Dashboard' else 'settings'}")
    found = globals()[name] = getattr(module, name)
    return found
