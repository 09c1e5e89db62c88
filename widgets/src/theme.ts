// Reads colors for the canvas from the page, and watches for theme changes.

/** Return a color of the panel's style sheet for use in a canvas. */
export function cssColor(element: Element, variable: string): string {
  return getComputedStyle(element).getPropertyValue(variable).trim() || "#888";
}

/** Call `changed` when the notebook or the system switches between light and dark. */
export function watchTheme(changed: () => void): () => void {
  const observer = new MutationObserver(changed);
  const attributeFilter = ["class", "data-jp-theme-name", "data-jp-theme-light", "theme", "style"];
  observer.observe(document.body, { attributeFilter });
  observer.observe(document.documentElement, { attributeFilter });
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", changed);
  return () => {
    observer.disconnect();
    system.removeEventListener("change", changed);
  };
}
