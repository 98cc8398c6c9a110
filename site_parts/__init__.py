"""Build the site from docs/*.md (`make docs`): reference pages from the code, diagrams, links out of the folder."""
