"""What turns docs/*.md into a site (`make docs`): reference pages from the code, pictures, links out of the folder."""
