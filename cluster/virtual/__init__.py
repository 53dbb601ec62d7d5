"""A cluster without machines: workers, tasks and messages as events on a virtual clock, behind the live dispatcher."""
