#!/usr/bin/env python3
"""Render a recipe for conda as rattler-build does before a build, with its errors: render.py RECIPE"""

import sys

from rattler_build import Stage0Recipe, VariantConfig

(rendered,) = Stage0Recipe.from_file(sys.argv[1]).render(
    VariantConfig({"c_compiler": ["gcc"], "c_stdlib": ["sysroot"], "python": ["3.12.*"]})
)
print(rendered.recipe.package.name, rendered.recipe.package.version)
