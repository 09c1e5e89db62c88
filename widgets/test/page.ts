// jsdom page for tests, with the global names that the modules use.

import { JSDOM } from "jsdom";

export function page(html = ""): JSDOM {
  const dom = new JSDOM(`<!doctype html><body>${html}</body>`, {
    url: "http://localhost:8888/lab/tree/x.ipynb",
    pretendToBeVisual: true,
  });
  const { window } = dom;
  const observer = class {
    observe(): void {}
    disconnect(): void {}
  };
  const names = ["document", "HTMLElement", "HTMLButtonElement", "Node", "Element", "MutationObserver", "getComputedStyle"] as const;
  for (const name of names) set(name, window[name]);
  set("window", window);
  set("ResizeObserver", observer);
  set("requestAnimationFrame", (call: () => void) => setTimeout(call));
  set("cancelAnimationFrame", clearTimeout);
  window.matchMedia = (() => ({ addEventListener() {}, removeEventListener() {} })) as never;
  return dom;
}

function set(name: string, value: unknown): void {
  Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
}

/** Wait until the drawing that a message asked for is done. */
export const drawn = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, 5));
