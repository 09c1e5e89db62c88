"""Operations that all ranks carry out together: save, load, switch, resize, export, import."""
