// Helpers to create elements; text always becomes a text node, never HTML.

type Child = Node | string | null;
type Value = string | number | boolean | null | ((event: never) => void);

const FOCUSABLE = new Set(["BUTTON", "INPUT", "SELECT", "TEXTAREA"]);

/** Create an element with attributes (`on...`: listeners) and children. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, Value> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      element.addEventListener(name.slice(2), value as unknown as EventListener);
    } else {
      setAttribute(element, name, value);
    }
  }
  // JupyterLab would interpret "d d" typed on a focused button as "delete this cell".
  if (FOCUSABLE.has(element.tagName) || "tabindex" in attributes) {
    element.setAttribute("data-lm-suppress-shortcuts", "true");
  }
  if (element instanceof HTMLButtonElement) element.type = "button";
  for (const child of children) if (child !== null) element.append(child);
  return element;
}

/** Set an attribute if it differs; null and false remove it, true sets it to "". */
export function setAttribute(element: Element, name: string, value: string | number | boolean | null): void {
  if (value === null || value === false) {
    element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** Set an element's text if it differs, so that a text selection is kept. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Set a style property if it differs. */
export function setStyle(element: HTMLElement | SVGElement, name: string, value: string): void {
  if (element.style.getPropertyValue(name) !== value) element.style.setProperty(name, value);
}

/**
 * Synchronizes the children of `parent` with a list of items: kept by key, created and removed as
 * needed. Elements persist across updates, and with them focus, selection and expanded rows.
 */
export class KeyedList<T, R extends { root: Element }> {
  readonly shown = new Map<string, R>();

  constructor(
    private readonly parent: Element,
    private readonly key: (item: T) => string,
    private readonly make: (item: T) => R,
    private readonly update: (row: R, item: T, index: number) => void,
    private readonly removed: (row: R) => void = () => {},
  ) {}

  show(items: readonly T[]): void {
    const wanted = new Map<string, T>();
    for (const item of items) {
      let key = this.key(item);
      while (wanted.has(key)) key += "'"; // show both of two items with the same key
      wanted.set(key, item);
    }
    for (const [key, row] of this.shown) {
      if (wanted.has(key)) continue;
      this.removed(row);
      row.root.remove();
      this.shown.delete(key);
    }
    const focused = this.parent.contains(document.activeElement) ? document.activeElement : null;
    let before: Element | null = this.parent.firstElementChild;
    let index = 0;
    for (const [key, item] of wanted) {
      const row = this.shown.get(key) ?? this.make(item);
      this.shown.set(key, row);
      if (row.root === before) before = before.nextElementSibling;
      else this.parent.insertBefore(row.root, before);
      this.update(row, item, index);
      index += 1;
    }
    // Moving a row in the DOM drops its focus.
    if (focused instanceof HTMLElement && focused !== document.activeElement && focused.isConnected) {
      focused.focus({ preventScroll: true });
    }
  }
}
