"""A stand-in for Ray in this process: actors that die when they are told to.

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


class Actor:
    def __init__(self, cluster, worker):
        self.cluster, self.worker, self.dead = cluster, worker, False

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self.cluster.call(self, name, args))


class Cluster(ModuleType):
    """What the engine uses of the module ray. Calls run when they are fetched, last one first."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, places, dies, empty_looks, open):
        super().__init__("ray")
        self.places, self.dies, self.empty_looks, self.is_open = places, dies, empty_looks, open
        self.made, self.calls, self.waiting, self.stored = [], 0, [], {}
        self.cloudpickle = SimpleNamespace(
            dumps=self.pickled, loads=lambda content: self.stored[content.decode()]
        )

    def pickled(self, value):
        """Keeps an object: what checks the types of this process's functions cannot be pickled."""
        return self.put(value).encode()

    def is_initialized(self):
        return self.is_open

    def init(self, address, **more):
        raise ConnectionError(f"no answer from {address}")

    def nodes(self):
        cpus = 0 if self.empty_looks else self.places
        gone = {"Alive": False, "Resources": {"CPU": 99.0}}
        return [gone, {"Alive": True, "Resources": {"CPU": float(cpus)}}]

    def remote(self, kind):
        def make(*args):
            self.made.append(Actor(self, kind(*args)))
            return self.made[-1]

        return SimpleNamespace(options=lambda **more: SimpleNamespace(remote=make))

    def put(self, value):
        reference = f"reference {len(self.stored)}"
        self.stored[reference] = value
        return reference

    def call(self, actor, name, args):
        reference = self.put((actor, name, args))
        self.waiting.append(reference)
        return reference

    def wait(self, references, timeout):
        if self.empty_looks:
            self.empty_looks -= 1
            return [], references
        assert set(references) <= set(self.waiting)
        return [references[-1]], references[:-1]

    def get(self, reference):
        if reference not in self.waiting:
            return self.stored[reference]
        self.waiting.remove(reference)
        actor, name, args = self.stored.pop(reference)
        self.calls += name == "measured"
        if actor.dead or (name == "measured" and self.calls in self.dies):
            actor.dead = True
            raise RayError("the actor died")
        try:
            return getattr(actor.worker, name)(*args)
        except Exception as error:
            raise RayTaskError(error) from None

    def kill(self, actor):
        actor.dead = True


def install(monkeypatch, places=3, dies=(), empty_looks=0, open=True, versions=None):
    """Puts a cluster in the place of Ray. versions: what the driver has that the actors lack."""
    cluster = Cluster(places, dies, empty_looks, open)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    if versions:
        check = ray_actors.Worker.check
        asked = lambda worker, wanted: check(worker, wanted | versions)  # noqa: E731
        monkeypatch.setattr(ray_actors.Worker, "check", asked)
    return cluster
