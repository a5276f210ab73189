"""A stand-in for Ray in this process: tasks whose workers die when they are told to.

The real one takes ten seconds to start. tests/on_ray.py has it.
"""

import sys
from types import ModuleType, SimpleNamespace

from crate_interp.questions import engines


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        self.cause = cause


class Cluster(ModuleType):
    """What the engine uses of the module ray. Tasks run when they are fetched, last one first."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, places, dies):
        super().__init__("ray")
        self.places, self.dies, self.calls = places, dies, 0
        self.stored, self.waiting, self.sent, self.cancelled = {}, [], [], []
        self.cloudpickle = SimpleNamespace(
            dumps=self.pickled, loads=lambda content: self.stored[content.decode()]
        )

    def pickled(self, value):
        """Keeps an object: what checks the types of this process's functions cannot be pickled."""
        return self.put(value).encode()

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": float(self.places)}

    def remote(self, function):
        def send(*args):
            self.sent.append(args[1])
            self.waiting.append(self.put((function, args)))
            return self.waiting[-1]

        return SimpleNamespace(options=lambda **more: SimpleNamespace(remote=send))

    def put(self, value):
        reference = f"reference {len(self.stored)}"
        self.stored[reference] = value
        return reference

    def wait(self, references):
        assert set(references) <= set(self.waiting)
        return [references[-1]], references[:-1]

    def get(self, reference):
        if reference not in self.waiting:
            return self.stored[reference]
        self.waiting.remove(reference)
        function, args = self.stored[reference]
        self.calls += 1
        while self.calls in self.dies:  # Ray starts another worker, which has opened nothing
            engines._opened.clear()
            self.calls += 1
            if self.calls > max(self.dies) > 90:
                raise RayError("the worker died")
        try:
            return function(*args)
        except Exception as error:
            raise RayTaskError(error) from None

    def cancel(self, reference, force):
        self.cancelled.append(reference)


def install(monkeypatch, places=3, dies=(), versions=None):
    """Puts a cluster in the place of Ray. versions: what the driver has that the workers lack."""
    cluster, found = Cluster(places, dies), engines.surroundings
    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setattr(engines, "_opened", {})
    if versions:  # until the first task runs, only the driver asks
        here = lambda: found() | ({} if cluster.calls else versions)  # noqa: E731
        monkeypatch.setattr(engines, "surroundings", here)
    return cluster
