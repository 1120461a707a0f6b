"""What is predicted for an image. `jaxdp.choices.TASKS` lists the built-in tasks, whose modules have the same functions."""
