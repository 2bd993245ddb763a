"""The parts that methods are made of. A method imports parts; a part never imports a method."""
