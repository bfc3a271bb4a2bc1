"""Have the reference show what builds an Equinox module: as of any dataclass, its fields.

Griffe reads the source and knows dataclasses by their decorator, which Equinox modules do without.
"""

import griffe


def is_module(cls: griffe.Class) -> bool:
    """Whether a class is an Equinox module that is built from its fields, and not by an `__init__`."""
    classes = [cls, *cls.mro()]
    bases = {str(base.canonical_path) for one in classes for base in one.bases if isinstance(base, griffe.Expr)}
    return "equinox.Module" in bases and not any("__init__" in one.members for one in classes)


class EquinoxModules(griffe.Extension):
    """Adds the decorator, and says of a field what its default is, as `eqx.field` does."""

    def on_package(self, *, pkg: griffe.Module, **_):
        """Go through the package when all of it is read."""
        self._read(pkg)

    def _read(self, where: griffe.Module | griffe.Class) -> None:
        for member in list(where.members.values()):
            if isinstance(member, griffe.Module):
                self._read(member)
            elif isinstance(member, griffe.Class) and is_module(member):
                name = griffe.ExprAttribute(
                    [griffe.ExprName("dataclasses"), griffe.ExprName("dataclass", parent="dataclasses")]
                )
                member.decorators.append(griffe.Decorator(name, lineno=member.lineno, endlineno=member.lineno))
                for field in member.members.values():
                    if isinstance(field, griffe.Attribute):
                        field.value = default_of(field.value)


def default_of(value: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """A field's default, which `eqx.field(static=True, default=...)` may hold."""
    if not isinstance(value, griffe.ExprCall) or value.canonical_path != "equinox.field":
        return value
    given = {one.name: one.value for one in value.arguments if isinstance(one, griffe.ExprKeyword)}
    return given.get("default")
