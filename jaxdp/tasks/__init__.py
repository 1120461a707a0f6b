"""What is predicted for an image: `classes`, one class, and `labels`, several labels. `jaxdp.choices.TASKS` lists them."""

from jaxdp.tasks import classes as classes
from jaxdp.tasks import labels as labels
