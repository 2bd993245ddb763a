"""What methods are made of. A method imports parts; a part never imports a method."""
