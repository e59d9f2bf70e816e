from hypothesis import given, settings
from plan_strategies import broken_plans, plans, bytes_by_sets
from tensile.schedules.check import check

@given(plans())
@settings(max_examples=500)
def test_a_valid_plan_has_no_findings(plan):
    assert check(plan) == ()
@given(broken_plans())
@settings(max_examples=500)
def test_broken(nb):
    name, plan = nb
    assert check(plan) != (), name
