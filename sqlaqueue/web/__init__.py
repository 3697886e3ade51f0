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

try:
    import jinja2  # noqa: F401 - all modules of this folder need it
    import starlette  # noqa: F401 - all modules of this folder need it
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"sqlaqueue.web needs {missing.name}: pip install 'sqlaqueue[web]'", name=missing.name
    ) from None

from sqlaqueue.web.dashboard import Dashboard
from sqlaqueue.web.settings import ACTIONS, Access, Action

__all__ = ["ACTIONS", "Access", "Action", "Dashboard"]
