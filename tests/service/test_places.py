from __future__ import annotations

import pytest

from service.jobs.addresses import NotAllowed, Places
from workers.options import ConvertOptions


@pytest.mark.parametrize("name", ["config_dir", "base"])
def test_an_option_that_names_a_place_is_held_to_the_allowed_sources(tmp_path, name):
    places = Places.of((str(tmp_path / "runs"),), (str(tmp_path / "models"),))
    source, destination = str(tmp_path / "runs" / "1"), str(tmp_path / "models" / "1")
    inside = ConvertOptions.from_dict({name: str(tmp_path / "runs" / "beside")})
    assert places.check(source, destination, inside) == (source, destination)
    outside = ConvertOptions.from_dict({name: str(tmp_path / "secrets")})
    with pytest.raises(NotAllowed):
        places.check(source, destination, outside)
