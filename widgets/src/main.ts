// Entry point of the panel's front end, loaded by anywidget: one store per widget model, one view per
// display. Runs in the notebook's page. Its only network request goes to the notebook's own server, if
// an interrupt has no effect.

import "uplot/dist/uPlot.min.css";
import "./panel.css";
import { checkpointsView } from "./checkpoints.ts";
import { curvesView } from "./curves.ts";
import { devicesView } from "./devices.ts";
import { h, setAttribute } from "./dom.ts";
import { headerView } from "./header.ts";
import { profileView } from "./profile.ts";
import type { FrontendMessage } from "./protocol.ts";
import { ranksView } from "./ranks.ts";
import { Store, type Topic } from "./store.ts";
import { strategiesView } from "./strategies.ts";
import { tabsView } from "./tabs.ts";
import type { View } from "./view.ts";

/** The part of anywidget's model that is used here. */
export interface Model {
  on(event: string, listener: (...args: unknown[]) => void): void;
  off(event: string, listener: (...args: unknown[]) => void): void;
  send(message: unknown): void;
}

/** Show a store in an element. Returns a function that removes it. */
export function show(store: Store, element: HTMLElement): () => void {
  const views: View[] = [
    headerView(store),
    devicesView(store),
    profileView(store),
    curvesView(store),
    tabsView(store, [
      { name: "Strategies", view: strategiesView(store), count: () => store.state.strategies.rows.length },
      { name: "Ranks", view: ranksView(store), count: () => store.state.ranks.length },
      { name: "Checkpoints", view: checkpointsView(store), count: () => store.state.checkpoints.length },
    ]),
  ];
  const root = h(
    "section",
    { class: "nbdist", "aria-label": "nbdist panel" },
    ...views.map((view) => view.root),
  );
  element.append(root);

  // Draw once per frame regardless of the number of messages; hidden pages do not draw.
  const changed = new Set<Topic>();
  let frame = 0;
  function draw(): void {
    frame = 0;
    const now = new Set(changed);
    changed.clear();
    setAttribute(root, "data-link", store.link);
    for (const view of views) if (view.topics.some((topic) => now.has(topic))) view.update();
  }
  const unsubscribe = store.subscribe((topic) => {
    changed.add(topic);
    frame ||= requestAnimationFrame(draw);
  });
  const clock = setInterval(() => {
    store.checkLink();
    if (!document.hidden) for (const view of views) view.tick?.();
  }, 1000);
  for (const view of views) view.update();
  frame ||= requestAnimationFrame(draw);
  // Charts need a width, which is known only once the element is in the page.
  changed.add("series");
  return () => {
    unsubscribe();
    clearInterval(clock);
    cancelAnimationFrame(frame);
    for (const view of views) view.close?.();
    root.remove();
  };
}

export default function panel(): {
  initialize(props: { model: Model }): () => void;
  render(props: { el: HTMLElement }): () => void;
} {
  let store: Store;
  return {
    initialize({ model }) {
      store = new Store((message) => model.send(message));
      const receive = (message: unknown, buffers: unknown): void =>
        store.receive(message as FrontendMessage, (buffers ?? []) as DataView[]);
      // Fires when the kernel was restarted and this view is no longer connected.
      const disconnect = (): void => store.connect("gone");
      model.on("msg:custom", receive);
      model.on("comm_live_update", disconnect);
      store.hello();
      return () => {
        model.off("msg:custom", receive);
        model.off("comm_live_update", disconnect);
      };
    },
    render: ({ el }) => show(store, el),
  };
}
