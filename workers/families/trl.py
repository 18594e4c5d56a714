"""trl's value-head models: a language model with a head of its own for the values of a critic.

verl's critics fall back to it for architectures without token classification. The head keeps its name
(``v_head.summary``); only the wrapper's prefix goes.
Source: trl ``models/modeling_value_head.py``; verl ``utils/model.py`` (``load_valuehead_model``).
"""

from __future__ import annotations

from workers.families.rules import Table, rename

TABLES = (Table("trl_value_head", ("*",), (rename("pretrained_model.{rest}", "{rest}"),)),)
